"""Small programs that each show one way to use inchworm. Each runs in seconds and takes the number of steps as an argument."""
