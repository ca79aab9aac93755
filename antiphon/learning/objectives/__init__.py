"""Objectives beside that of a policy: critics, pairs, distillation."""
