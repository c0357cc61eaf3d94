"""Values, contracts and files that everything else is built on: types, protocols, spaces, trees, errors, seeding, verified files.

May import nothing else of inchworm.
"""
