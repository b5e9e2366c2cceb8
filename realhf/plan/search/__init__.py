"""Plan search: the problem as tables, evaluators, MCMC, and the simulator that predicts a run."""
