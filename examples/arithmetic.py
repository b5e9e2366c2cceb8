"""Creates the arithmetic task of the demo: ``python examples/arithmetic.py OUT --digits 2``; see --help."""

from realhf.apps.demo.arithmetic import main

if __name__ == "__main__":
    main()
