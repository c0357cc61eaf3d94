"""Types, protocols, spaces, trees, errors, seeding and verified files, which everything else builds on."""
