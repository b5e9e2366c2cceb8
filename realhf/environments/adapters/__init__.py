"""Environments of other libraries as environments of this one: one file per library, imported when it is used."""
