"""Everything private. The modules beside this folder re-export what is public."""
