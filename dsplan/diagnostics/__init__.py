"""Examining and measuring machines: `dsplan doctor` and `dsplan bench`. Training needs neither."""
