"""The model zoo as unit lists, and the splitting of any module into units."""
