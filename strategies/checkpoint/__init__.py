"""Checkpoints: one format for every strategy and any number of ranks; `docs/reference/checkpoints.md` describes it.

    directory/latest                    the name of the newest checkpoint
    directory/step-00000120/            one checkpoint; its files never change once the folder has this name
        state.json                      counters, groups, scheduler, client_state, and where each tensor lies
        rank-00000.safetensors          what rank 0 wrote of the tensors
        checksums.json                  size and CRC-32 of every other file
    directory/.step-00000160.tmp/       one that is being written, or that a crash left behind

`reading` believes nothing that it reads; `safefile` knows files, `retention` folders, `content` the lists; `parts` and
`storage` connect them to `torch.distributed.checkpoint`, `states` says what of an engine is saved under which name,
`saving` and `loading` put these together.
"""
