"""The offline verbs, which learn from given responses: DPO, reward models, distillation."""
