import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# A thousand connections from one process; many systems begin with 1,024 files.
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
