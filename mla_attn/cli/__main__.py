"""``python -m mla_attn.cli``."""

import sys

from mla_attn.cli import main

sys.exit(main())
