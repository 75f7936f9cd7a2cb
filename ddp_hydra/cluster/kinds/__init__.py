"""What each kind of cluster needs: one module per kind."""
