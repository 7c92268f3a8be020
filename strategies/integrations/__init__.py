"""Parts for other training libraries, public as `dsplan.integrations`."""
