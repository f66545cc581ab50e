from backends.drafting.suffix_trees import SuffixTrees as SuffixTrees  # and `held_bytes`, allocated memory in bytes
