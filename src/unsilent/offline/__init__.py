"""Questions asked after the fact: does that finding come out again, does that stretch of the run come out the same?"""
