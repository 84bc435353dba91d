"""One self-contained page from result files, with plots and tables, and the tables of the README."""
