"""``python -m moontide.cli``: the script ``kubectl-moontide``."""

import sys

from moontide.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
