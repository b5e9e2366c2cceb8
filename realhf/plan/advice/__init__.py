"""What users are told about plans: rates and price, expected errors, what decides between two, how to make one fit."""
