"""``python -m pagedraft.scheduler`` is the command ``pagedraft``."""

import sys

from pagedraft.scheduler.cli import main

if __name__ == "__main__":
    sys.exit(main())
