"""One module per subcommand of ``realhf``."""
