"""This library inside other packages. Each module is for one package and imports it only when it is used."""
