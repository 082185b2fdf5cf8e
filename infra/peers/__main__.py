"""Make the environments of the peers named, or of all, and print their Pythons."""

import sys

from infra.peers import NAMES, environment

for name in sys.argv[1:] or NAMES:
    print(environment(name))
