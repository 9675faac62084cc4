"""The choice of a token: penalties, filters, a seeded draw."""
