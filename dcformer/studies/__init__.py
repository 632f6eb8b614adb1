"""Studies: measurements of the paper's claims that write their settings, machine and every number they took."""
