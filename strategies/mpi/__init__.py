"""A library for programs that mpirun starts: gradients, ZeRO, timers, checkpoints; numpy and mpi4py, no torch.

`arrays` takes nested dicts and lists of arrays apart; `communicator` is the only module that calls MPI; `gradients`,
`zero`, `communicator`, `checkpoints`, `sizes`, `tensor_parallel`, `recompute` and `trainer` define the exports of
`dsplan.mpi`, see `docs/reference/mpi.md`.
"""
