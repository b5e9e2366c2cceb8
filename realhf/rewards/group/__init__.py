"""Group-wise rewards: scores of all responses to a prompt together."""
