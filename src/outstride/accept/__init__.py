"""Acceptors that several methods share. A rule that belongs to one method is in that method's file."""
