"""The clusters of the tests require a token: Ray listens on all interfaces, and runs whatever it is sent."""

import os
import secrets

# Before anything imports Ray, which reads them once. Nodes and drivers in other processes inherit them.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
