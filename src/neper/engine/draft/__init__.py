"""Drafts: tokens that may follow, proposed before the model is asked."""
