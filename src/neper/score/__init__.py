"""Scores of many rows: of a file by `neper score`, of any rows by `neper.score_dataset`."""
