"""The environment variables by which `dsplan run` tells the ranks what to do."""

PLAN_FILE = "DSPLAN_PLAN"
"""Path of the plan to follow."""
STRATEGY = "DSPLAN_STRATEGY"
"""The strategy to plan for, where there is no plan."""
RUN_DIRECTORY = "DSPLAN_RUN_DIR"
"""Where the ranks write their metrics."""
