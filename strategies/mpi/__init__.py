"""A library for programs that mpirun starts: gradients, ZeRO, timers, checkpoints; numpy and mpi4py, no torch.

`tree` and `arrays` take nested dicts and lists of arrays apart; `wire` is the only module that calls MPI; `gradients`,
`zero`, `performance`, `checkpoints` and `sizes` hold what `dsplan.mpi` exports. `docs/reference/mpi.md` describes them.
"""
