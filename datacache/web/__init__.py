"""The web page: look at data sets, their versions and images in a browser (`dsctl ui`).

`server` runs it, `access` decides who is let in, `app` puts the two together with the pages. Imports `datacache.api`,
`core` and `settings` only, and needs the extra `ui`.
"""
