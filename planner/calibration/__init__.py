"""Learning from measured runs: few physical factors per kind of hardware, with what is known of their error."""
