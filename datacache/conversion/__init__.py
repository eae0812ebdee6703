"""Conversion: a snapshot made from another one, images by reference, annotations written anew."""
