"""Studies: what a check catches, measured on many injected faults, with everything needed to judge the figures."""
