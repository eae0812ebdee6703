"""The pages, a module for those of one kind. Each has `routes`; a page is a function of the site and a request."""
