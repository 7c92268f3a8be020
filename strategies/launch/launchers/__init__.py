"""The launchers behind `dsplan run --launcher`: each starts every rank once, through the program that does it well."""
