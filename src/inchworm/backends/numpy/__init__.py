"""Acting without a learning framework, and the mathematics as reference."""
