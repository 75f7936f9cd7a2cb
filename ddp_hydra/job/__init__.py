"""Run one composed config and fill one run directory."""
