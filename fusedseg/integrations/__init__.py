"""Plug-ins for training frameworks; each is imported by its own name, such as ``fusedseg.integrations.monai``.

Importing fusedseg imports none of them, and a model that was trained with one of them loads without fusedseg.
"""
