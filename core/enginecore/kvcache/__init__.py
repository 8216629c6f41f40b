"""Where attention state lives: block hashing, the block pool and block tables. Knows blocks, not devices."""

from enginecore.kvcache.block_pool import BlockPool
from enginecore.kvcache.hashing import block_hashes, root_hash
from enginecore.kvcache.manager import BlockTable, KVCacheManager

__all__ = ["BlockPool", "BlockTable", "KVCacheManager", "block_hashes", "root_hash"]
