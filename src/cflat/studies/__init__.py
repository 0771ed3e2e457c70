"""Studies: questions that take several runs, or a closer look at one."""
