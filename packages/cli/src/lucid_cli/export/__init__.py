"""Reports in the forms of other programs: a module a form, and where it goes."""
