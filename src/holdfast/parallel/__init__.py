"""How a model is divided over ranks. Models do not know it: everything here is applied to them from outside."""
