"""The one place that reaches into torch's private parts; every other module takes them from here.

`entries.yaml` lists each private name with the parameters it is called by and the versions of torch it was checked on;
`tests/strategies/torch_compat/` probes them all on the installed version and finds private names used elsewhere.
What replaces a function of torch can be undone: `replacing`.
"""

FULLY_SHARD_MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module whose `fully_shard` the launcher replaces while it is imported."""
