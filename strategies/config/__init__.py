"""The config of a script, as DeepSpeed writes it, understood without DeepSpeed.

Reading one (`read`) imports much of the planner, for its limits; `values` alone does not, as every rank that only
measures itself has some of them.
"""
