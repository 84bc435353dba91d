"""`python -m outstride.cli`, for where scripts are not on the path."""

import sys

from outstride.cli.app import main

sys.exit(main())
