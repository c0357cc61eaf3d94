"""Who acts and learns: one folder a framework, one specification for all."""
