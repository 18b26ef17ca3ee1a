"""How a model is cut over ranks. Models do not know it: everything here is done to them from outside."""
