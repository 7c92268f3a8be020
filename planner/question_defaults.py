"""Defaults of a question: what flags, requests and workloads take where nothing is asked for. No torch."""

LORA_RANK = 8
"""Rank of adapters: PEFT's own default (`LoraConfig.r`)."""
LORA_TARGETS = "all-linear"
"""Layers that adapters go beside."""
EXPERT_IMBALANCE = 1.25
"""Tokens that come to the busiest rank's experts over the mean: the capacity factor that Switch Transformers train
with, beyond which tokens are dropped (Fedus et al. 2021, arXiv 2101.03961, section 2.2; recalled)."""
PLANS_SHOWN = 5
"""Plans that an answer has at the most (`--top`)."""
ASSUMED_GPU = "A100-SXM4-80GB"
ASSUMED_COUNT = 8
"""Hardware that is planned for where none is named and none is here: the devices and how many in a node."""
