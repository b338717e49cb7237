"""What demo chat prompts are about: noun phrases by field, and other fillers of templates.

Every list is dealt out to the blocks of ``chat_prompts`` by position, so lists hold a multiple of
``NUM_BLOCKS`` entries, and neighbours go to different blocks. Topics of the prompts that the
project measures with (those of the demo, the benches and the tests) are left out on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping

NUM_BLOCKS = 8

# field -> subjects that "Explain ...", "What is interesting about ..." can be followed by.
SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "astronomy": (
        *("black holes", "the phases of the moon", "comets", "the life cycle of a star"),
        *("solar eclipses", "the rings of Saturn", "light years", "the Milky Way"),
        *("asteroids", "the expansion of the universe", "space telescopes", "neutron stars"),
        *("the surface of Mars", "gravity assists", "meteor showers", "exoplanets"),
    ),
    "biology": (
        *("photosynthesis", "the human heart", "DNA", "natural selection"),
        *("the immune system", "bacteria", "how muscles work", "the food chain"),
        *("cell division", "fungi", "sleep in animals", "pollination"),
        *("the human eye", "viruses", "inherited traits", "symbiosis"),
    ),
    "animals": (
        *("the migration of birds", "honeybees", "octopuses", "the social life of wolves"),
        *("bats and echolocation", "penguins", "spiders and their webs", "elephants"),
        *("camouflage in nature", "whales", "ant colonies", "domestic cats"),
        *("the speed of cheetahs", "sea turtles", "owls", "beavers and their dams"),
    ),
    "physics": (
        *("gravity", "magnetism", "the speed of light", "friction"),
        *("sound waves", "nuclear fusion", "static electricity", "the conservation of energy"),
        *("relativity", "lenses and mirrors", "semiconductors", "momentum"),
        *("superconductors", "radio waves", "buoyancy", "entropy"),
    ),
    "chemistry": (
        *("the periodic table", "acids and bases", "rust", "catalysts"),
        *("chemical bonds", "plastics", "fermentation", "soap"),
        *("the states of matter", "combustion", "batteries", "crystals"),
        *("water hardness", "isotopes", "polymers", "distillation"),
    ),
    "earth and weather": (
        *("earthquakes", "thunderstorms", "the water cycle", "glaciers"),
        *("volcanoes", "tides", "monsoons", "plate tectonics"),
        *("rainbows", "deserts", "hurricanes", "soil erosion"),
        *("coral reefs", "fog", "caves", "the ozone layer"),
    ),
    "history": (
        *("the Roman Empire", "the Silk Road", "the invention of printing", "the Black Death"),
        *("ancient Egypt", "the Industrial Revolution", "the Vikings", "the Renaissance"),
        *(
            "the fall of the Berlin Wall",
            "the Inca civilization",
            "medieval castles",
            "the Moon landing",
        ),
        *("the French Revolution", "the history of writing", "the age of sail", "the Cold War"),
    ),
    "places": (
        *("the Amazon rainforest", "Iceland", "the Great Wall of China", "the Sahara"),
        *("Venice", "the Himalayas", "New Zealand", "the Nile"),
        *("Antarctica", "Istanbul", "the Grand Canyon", "Japan's railways"),
        *("the Netherlands and its dikes", "Mexico City", "the Great Barrier Reef", "Kenya"),
    ),
    "technology": (
        *("solar panels", "electric cars", "the internet", "3D printing"),
        *("GPS", "touch screens", "wind turbines", "barcodes"),
        *("digital cameras", "satellites", "elevators", "fibre-optic cables"),
        *("noise-cancelling headphones", "refrigerators", "smoke detectors", "robots in factories"),
    ),
    "computing": (
        *("recursion", "databases", "encryption", "machine learning"),
        *("operating systems", "version control", "hash tables", "open source software"),
        *("binary search", "passwords and password managers", "cloud computing", "unit testing"),
        *("compilers", "computer viruses", "data compression", "regular expressions"),
    ),
    "mathematics": (
        *("prime numbers", "probability", "the Pythagorean theorem", "fractions"),
        *("negative numbers", "statistics and averages", "infinity", "graphs of functions"),
        *("percentages", "the number pi", "compound interest", "geometry in everyday life"),
        *("logarithms", "symmetry", "calculus", "the Fibonacci sequence"),
    ),
    "money and work": (
        *("inflation", "saving for retirement", "supply and demand", "remote work"),
        *("taxes", "the stock market", "insurance", "small businesses"),
        *("credit cards", "job interviews", "teamwork", "budgeting for a household"),
        *("advertising", "international trade", "leadership", "freelancing"),
    ),
    "health": (
        *("a good night's sleep", "vitamins", "stretching", "stress"),
        *("drinking enough water", "allergies", "vaccines", "posture at a desk"),
        *("walking every day", "the common cold", "sunscreen", "meditation"),
        *("a balanced diet", "first aid", "caffeine", "healthy teeth"),
    ),
    "arts": (
        *("jazz", "watercolour painting", "Shakespeare's plays", "photography"),
        *("opera", "pottery", "science fiction", "impressionism"),
        *("film music", "comics", "ballet", "architecture in big cities"),
        *("street art", "the violin", "detective novels", "poetry"),
    ),
    "sport and games": (
        *("chess", "marathon running", "football", "rock climbing"),
        *("the Olympic Games", "swimming", "board games", "tennis"),
        *("yoga", "basketball", "sailing", "puzzles and riddles"),
        *("table tennis", "hiking", "video games", "cricket"),
    ),
    "home and garden": (
        *("houseplants", "composting", "growing tomatoes", "baking bread"),
        *("tidying up", "saving electricity at home", "painting a room", "herb gardens"),
        *("bird feeders", "reducing food waste", "knitting", "rainwater barrels"),
        *("keeping bees", "repairing furniture", "a good kitchen knife", "lawn care"),
    ),
    "society": (
        *("democracy", "public libraries", "recycling", "public transport"),
        *("volunteering", "social media", "human rights", "school uniforms"),
        *("tourism", "museums", "traffic in cities", "newspapers"),
        *("courts and judges", "space exploration budgets", "neighbourhood festivals", "voting"),
    ),
    "language and mind": (
        *("learning a second language", "memory", "dreams", "body language"),
        *("sign language", "habits", "the origin of words", "optical illusions"),
        *("curiosity", "the alphabet", "procrastination", "friendship"),
        *("decision making", "humour", "accents and dialects", "creativity"),
    ),
}

PAIRS = (
    *("tea and coffee", "cats and dogs as pets", "trains and planes", "books and films"),
    *("living in a city and living in the country", "lists and tuples in Python"),
    *("butter and olive oil", "paper books and e-books"),
    *("summer and winter holidays", "renting and owning a home", "a laptop and a tablet"),
    *("lakes and rivers", "viruses and bacteria", "SQL and NoSQL databases"),
    *("electric and petrol cars", "fruit and vegetables"),
    *("crocodiles and alligators", "a virus scanner and a firewall", "jogging and cycling"),
    *("working at home and working in an office", "wool and cotton"),
    *("weather and climate", "frogs and toads", "a loan and a mortgage"),
    *("interpreted and compiled languages", "hurricanes and tornadoes"),
    *("a symphony and a concerto", "novels and short stories", "speed and velocity"),
    *("dictionaries and sets in Python", "gas and electric cookers", "emails and letters"),
    *("comets and asteroids in the sky", "moths and butterflies", "TCP and UDP"),
    *("a cold and the flu", "breadth-first and depth-first search", "gold and silver"),
    *("public and private schools", "wood and steel as building materials"),
)

DISHES = (
    *("tomato soup", "vegetable curry", "apple pie", "fried rice", "a Greek salad", "chilli"),
    *("banana bread", "mushroom risotto", "lentil stew", "roast chicken", "guacamole"),
    *("spaghetti with garlic and oil", "potato salad", "chocolate cookies", "hummus"),
    *("an omelette with herbs", "pumpkin soup", "fish tacos", "oat porridge with fruit"),
    *("stuffed peppers", "pizza dough", "lemonade", "a cheese toast", "onion soup"),
    *("rice pudding", "a bean burrito", "carrot cake", "noodle soup", "baked salmon"),
    *("cucumber salad", "blueberry muffins", "a breakfast smoothie"),
)

TASKS = (
    *("change a flat bicycle tyre", "tie a bow tie", "remove a coffee stain from a shirt"),
    *("back up the photos on a phone", "sharpen a pencil with a knife", "wrap a present neatly"),
    *("set up a tent", "write a thank-you note", "descale a kettle", "fold a paper plane"),
    *("clean a computer keyboard", "plant a tree", "read a city map", "hang a picture straight"),
    *("learn ten new words a day", "iron a shirt", "start a campfire safely", "pack a suitcase"),
    *("choose a strong password", "sew on a button", "prepare for a job interview"),
    *("give a short speech", "cut an onion without tears", "train for a first 5 km run"),
    *("unblock a sink", "make a budget for a month", "calm a crying baby", "jump-start a car"),
    *("improve one's handwriting", "take notes in a lecture", "polish leather shoes"),
    *("measure a room for a carpet", "grow basil on a windowsill", "prepare for an exam"),
    *("sort a large collection of books", "keep a diary", "boil an egg", "repair a torn page"),
    *("install Python on a new computer", "organise a surprise party", "clean a window"),
    *("recognise a phishing email", "wash a wool sweater", "split a restaurant bill fairly"),
    *("learn to juggle three balls", "build a birdhouse", "store potatoes", "read faster"),
)

RECIPIENTS = (
    *("my landlord about the broken heater", "my manager about a day off next Friday"),
    *("a customer whose parcel is late", "my teacher about a missed lesson"),
    *("a colleague who helped me with a report", "a hotel about a forgotten jacket"),
    *("the city council about a dangerous crossing", "an old friend I have not seen for years"),
    *("a company to ask about an internship", "my neighbours about a party on Saturday"),
    *("a bank about a charge I do not recognise", "a restaurant about a table for twelve"),
    *("the team about a meeting that moved to Tuesday", "a supplier about a wrong delivery"),
    *("my doctor's office to change an appointment", "a candidate we cannot hire"),
    *("the parents of a class about a school trip", "a museum about guided tours"),
    *("a mentor to say thank you", "the electricity company about a bill that is too high"),
    *("a client to explain a delay of two weeks", "my aunt to thank her for a birthday gift"),
    *("a publisher about a manuscript", "the building manager about a noisy lift"),
    *("subscribers about a new opening time", "a professor about a thesis topic"),
    *("a garage about an estimate for a repair", "all staff about saving paper"),
    *("a travel agency to cancel a trip", "a newspaper about an error in an article"),
    *("new volunteers about their first day", "a friend to apologise for being late"),
)

PLANS = (
    *("a weekend in Lisbon", "a birthday party for a six-year-old", "a week of healthy lunches"),
    *("a day at the zoo with grandparents", "a small vegetable garden", "a book club evening"),
    *("moving to a new flat", "a study week before exams", "a company picnic for forty people"),
    *("a three-day hike", "learning to type with ten fingers", "a first date in a small town"),
    *("a month of running for beginners", "a rainy Sunday with two children"),
    *("a science fair at school", "the first week in a new job", "a road trip through Scotland"),
    *("a garage sale", "a dinner for vegetarian guests", "a photo project for a year"),
    *("a weekly cleaning schedule", "a family reunion", "a first visit to Tokyo"),
    *("a small podcast", "a charity run", "an evening of board games", "a winter holiday"),
    *("a home office in a small room", "a language exchange meeting", "a class reunion"),
    *("a quiet day without screens", "a web site for a bakery"),
)
