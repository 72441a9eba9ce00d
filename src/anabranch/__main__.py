"""``python -m anabranch``: the command line."""

from anabranch.cli import main

main()
