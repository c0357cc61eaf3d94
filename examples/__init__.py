"""Small programs, each of which shows one way to use inchworm. Every one runs in seconds and takes the number of steps as an argument."""
